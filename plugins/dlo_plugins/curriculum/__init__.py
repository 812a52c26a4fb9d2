"""What trains when: sequence lengths, the order of samples, dropped layers and tokens, frozen parts."""
