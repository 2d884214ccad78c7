# tollgate.yaml: read into Settings, or refused with everything that is wrong with it.
