# Fits and judges the complexity model; run by hand, never by the service.
