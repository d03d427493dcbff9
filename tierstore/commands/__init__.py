"""What can be said on the command line, a module for each command. Each imports what it needs when it runs."""
