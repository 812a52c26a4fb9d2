"""How every benchmark measures and tells: rounds and clocks, the record of a run, the report made of all."""
