# What config.json says of a model, checked before any weight is read.
