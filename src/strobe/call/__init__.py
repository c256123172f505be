"""From a call to its launches: operators and their derivatives, the choice of a backend, launches that are prepared once."""
