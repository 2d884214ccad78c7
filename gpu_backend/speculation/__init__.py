# Draft tokens: which sequences get some, how many, and whether they pay.
