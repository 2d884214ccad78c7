# What may not pass: rules, classifiers and an outside checker, the policy that says what they lead to, and who hears of
# it. docs/safety.md tells the whole.
