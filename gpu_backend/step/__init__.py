# Values that cross the engine: its configuration, requests, sequences, the plan of a step and its result.
