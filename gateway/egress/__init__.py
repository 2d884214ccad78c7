# Which addresses the gateway may connect to for others: callback URLs and image URLs.
