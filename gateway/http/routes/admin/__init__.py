# Routes for holders of an admin key.
