# What clients may ask, checked before the engine hears of it.
