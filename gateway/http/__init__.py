# What every route shares: the response that runs a call, errors, limits of connections, the API's description.
