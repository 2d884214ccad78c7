# Commands that ask a gateway over HTTP, from any machine.
