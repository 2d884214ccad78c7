# Comparisons and measurements on the engine's simulator; run by hand from a checkout.
