"""The command line: every command is a thin layer over functions that scripts can call as well."""
