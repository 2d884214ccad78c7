# Shadow traffic: a share of calls is asked of another model too, compared, and moves the thresholds.
