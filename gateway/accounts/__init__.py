# Teams, their keys, and the callers those keys identify.
