# What an endpoint is in its API's terms: checks, options, the writer of replies, the shape of errors.
