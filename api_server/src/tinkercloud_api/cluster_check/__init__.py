"""The checks of `tinkercloud cluster check`: whether a cluster is ready for the chart.

`reading.py` asks the cluster and does nothing else; all decisions are functions of what it read.
"""
