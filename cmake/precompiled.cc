// Only carries the precompiled headers (PhalanxPrecompiled.cmake).
