# Fits and judges the safety classifiers; run by hand, never by the service.
