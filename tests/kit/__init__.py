"""What tests are made of: experiments, ranks, servers, disks, containers."""
