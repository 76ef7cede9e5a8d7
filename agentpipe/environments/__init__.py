"""Line profile, catalogue, disturbance table and fields, simulator, pools and players."""
