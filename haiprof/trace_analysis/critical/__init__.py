"""Critical path of one rank: the chain of events that a window's length consists of."""
