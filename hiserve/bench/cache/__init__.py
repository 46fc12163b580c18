"""What ``hiserve bench cache`` sends, measures and draws, and the endless cache it compares with."""
