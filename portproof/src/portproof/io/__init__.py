"""Files, missing libraries and progress; an addition to `sturdyio`."""
