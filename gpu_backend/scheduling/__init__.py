# Which sequences run in the next step: admission, fairness, budgets, preemption.
