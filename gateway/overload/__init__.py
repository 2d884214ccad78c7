# What happens when every target is busy: fair turns in bounded queues, then an honest refusal.
