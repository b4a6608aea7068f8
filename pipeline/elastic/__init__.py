"""Elastic training: a lost rank leaves the others running, who redo the step; one that comes gets the weights from a peer."""
