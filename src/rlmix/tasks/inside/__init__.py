"""Programs that a verdict runs inside its sandbox. They are handed over as text, never imported
there: `programs.py` joins the parts and compiles them. Only the standard library may be used."""
