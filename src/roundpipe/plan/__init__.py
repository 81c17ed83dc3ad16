"""Pure decisions: costs -> stages -> an explicit list of actions per device. Nothing here touches a device."""
