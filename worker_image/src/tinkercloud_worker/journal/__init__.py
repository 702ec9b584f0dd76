"""The journal of a run: the requests that change its model, in files that outlive the head."""
