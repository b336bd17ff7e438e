"""Checks that take too long for the tests: the fault gallery, false alarms, damaged files, versions, processors."""
