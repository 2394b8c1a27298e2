# filled in with the install rules
