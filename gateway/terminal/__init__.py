# What commands share at a terminal: how they print, and the gateway on another machine that they ask over HTTP.
