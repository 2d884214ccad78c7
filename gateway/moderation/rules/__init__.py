# Rules for what can be told by its form, and what the policy makes of a finding. Pure.
