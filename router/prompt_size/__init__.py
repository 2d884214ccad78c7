# How many tokens a request can use at the most, and what it can cost.
