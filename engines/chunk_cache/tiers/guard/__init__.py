"""What keeps a tier from raising, hanging or flooding: deadlines, a breaker, one lane a tier."""
