"""What a run consists of: frozen records in, one frozen record out. Prints nothing."""
