# Responses that were stored: read again, gone on from, deleted.
