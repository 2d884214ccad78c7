# tollgate.yaml: read into settings, or refused with everything that is wrong with it.
