# Events to teams as rows, written in the transaction that they tell of; their form, signature and schedule.
