"""The running operator: watches, work queue, leader election, and everything that does I/O."""
