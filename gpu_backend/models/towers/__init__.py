# What makes vectors of pictures, and puts them in the places of tokens.
