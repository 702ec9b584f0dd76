"""What tests of any kind need: waiting, clocks, ports, built packages."""
