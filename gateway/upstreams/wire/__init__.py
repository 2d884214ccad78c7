# What every wire format shares: its protocol, its errors, how streams and limits are read.
