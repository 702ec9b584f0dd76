"""Decisions about pods: failures, disruptions, drift, deadlines, nodes that fit. Pure."""
