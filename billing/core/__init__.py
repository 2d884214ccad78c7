# Money, prices, usage records, request ids, limits and errors: values that the rest of billing counts with.
