# How gateways and engines open sockets, speak HTTP and notice clients that leave.
