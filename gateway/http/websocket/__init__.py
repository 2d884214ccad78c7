# One response after the other over a connection that stays open: the Responses API's WebSocket mode.
