"""Creating and listing what owners run: training runs, samplers, programs, uploaded losses."""
