# The table of inference endpoints: what each takes and refuses, its options, its writer of replies, its errors.
