"""Shows what each role of a kernel did when."""
