# One call as it runs: what was asked, its accounting, what has come of it, what watches it.
