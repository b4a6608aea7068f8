"""What people look at afterwards."""
